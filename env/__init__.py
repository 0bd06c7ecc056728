"""The traffic environment: numpy, gymnasium and traci only, never torch (rollout workers stay small).

`import env` registers it with gymnasium, as a graph and flat; both take `cfg`, a configs.Config, and may take `folder`.
"""
import gymnasium

gymnasium.register("mixed_autonomy/Traffic-v0", entry_point="env.traffic_env:TrafficEnv")
gymnasium.register("mixed_autonomy/FlatTraffic-v0", entry_point="env.flat:FlatTraffic")
