"""The process that sends: a dispatcher of one database or a fleet of several, its signals, and its schedule."""
