"""Devices and interconnects: published figures as data files, and figures measured on this machine."""
