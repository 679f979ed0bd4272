"""How a model is spread over processes: one module for each strategy, all behind one protocol. None of them knows a
task.
"""
