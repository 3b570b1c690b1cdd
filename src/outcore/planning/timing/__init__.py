"""Steps in time: rates of a machine, work of a model, and its schedule played at these rates."""
