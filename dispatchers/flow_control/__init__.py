"""Pure rules that limit how much is sent to a destination: limits, state, permits, fair shares."""
