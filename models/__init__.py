"""The four layers of the controller, torch only: risk GNN, world model, controller, safety shield.

Axis letters used throughout: B batch, T time (control steps), N vehicles (padded), C candidates (ICVs, padded),
K commands, k neighbours, H horizon of the prediction, D width of an embedding.
"""
