"""Answers kept between questions."""
