"""The judge of logs and packages: rules are data and small pure functions. Nothing in a checked file is executed."""
