"""The tables: columns, types, names, functions and rights."""
