"""Moving bytes between ranks: one protocol (`protocol.py`); its implementations are in `backends`."""
