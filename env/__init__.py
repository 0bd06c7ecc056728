"""The traffic environment: numpy, gymnasium and traci only, never torch (rollout workers stay small)."""
