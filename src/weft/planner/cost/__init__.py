"""What training costs, before anything runs: hardware as data sheets, work as data, and formulas
over both. No torch, but for `trace` and `reading`: the work of a module."""
