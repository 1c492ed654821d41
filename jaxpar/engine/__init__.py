"""The engine: how the arguments of a run become compiled functions and their state.

Read `initialize` (the list of what happens), `placement` (where the state is stored),
`batches`, `program` (what is compiled), then `engine`, which binds them.
"""
