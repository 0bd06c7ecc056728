"""What of a driver the shield must know, asked with the stock client or libsumo."""


def habits(client, name, refused):
    """See env.sumo.Questions. `refused`: what the client raises for a question that SUMO does not take."""
    vehicle = client.vehicle
    return (len(vehicle.getStops(name, 1)) > 0, vehicle.getParameter(name, "has.bluelight.device") == "true",
            vehicle.getActionStepLength(name), vehicle.getMinGap(name), vehicle.getTau(name),
            _boldness(client, name, refused))


def _boldness(client, name, refused):
    try:
        return float(client.vehicle.getParameter(name, "laneChangeModel.lcAssertive"))
    except refused:
        return 1.0  # a lane-change model that knows no such thing
