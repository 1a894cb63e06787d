"""The decisions themselves: a pure state machine. Values in, values out; no clock, no I/O."""
