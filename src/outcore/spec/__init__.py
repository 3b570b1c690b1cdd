"""Values that describe a model and where its bytes live: frozen dataclasses that touch no device."""
