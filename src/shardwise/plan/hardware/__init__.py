"""Devices and interconnects: published figures as data, and this machine's, measured."""
