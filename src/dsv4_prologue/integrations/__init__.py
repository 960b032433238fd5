"""The prologue inside other people's models and engines; the package itself imports none."""
