"""Models of published measurements, written as their sources write them, and how a row becomes a forecast."""
