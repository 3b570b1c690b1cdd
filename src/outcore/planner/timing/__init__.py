"""Steps in time: the rates of a machine, the work of a model, and its schedule played at these rates."""
