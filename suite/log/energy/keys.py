"""Names the keys of a power log, as MLCommons' logging package does. Imports nothing: the sampler starts with it."""

START, READING, STOP = "power_measurement_start", "power_reading", "power_measurement_stop"
EFFICIENCY, ESTIMATE = "conversion_eff", "interconnect_power_est"
SCOPES = ("device", "package", "package+device", "node", "rack")  # what a meter sees, the widest last
