"""`weft calibrate`: what this machine does, measured and written as a sheet that `--cluster local`
names.

`bench` times something on all ranks at once, for cores share caches and memory; `compute`, `links`
and `steps` say what is timed; `fits` makes constants of times, and `sheet` a sheet of constants.
`command` goes through them.
"""
