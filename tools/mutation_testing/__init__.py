"""Mutation testing: changes one thing in a checked module at a time and sees whether a test notices. `make mutants`."""
