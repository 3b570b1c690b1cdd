"""The command line: parse, call, print. The only package that prints."""
