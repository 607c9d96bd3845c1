"""`sw.doctor`: is this machine fit to train, and does this model train the same sharded as it does whole?

`result` is what it answers with. `environment` and `links` ask about machines and what is between them, `subject` is
what the user gave, `unsharded` runs the whole model on each rank, `whole_model` looks for mistakes there, `strategies`
compares the sharded model with it, and `doctor` asks all of them.
"""
