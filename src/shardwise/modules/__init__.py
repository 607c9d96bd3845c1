"""Modules that plain sharding does not cover: on the meta device, with PEFT's adapters, with tensor subclasses or
frozen linear weights, and with tensors that share memory."""
