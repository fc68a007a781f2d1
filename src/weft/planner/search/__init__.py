"""The planner's search: which layouts can be, what each would take, and which to train with."""
