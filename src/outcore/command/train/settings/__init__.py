"""What a run is to do: from a YAML file, flags and ``--set`` to one checked value."""
