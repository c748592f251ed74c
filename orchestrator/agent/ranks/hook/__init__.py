"""Hook in every Python process of a rank: copied to the node as `_orch_hook`, beside a `sitecustomize` that starts it.

Rules: standard library only, and as little of it as possible, since every interpreter start pays. It never breaks a
script: it swallows each of its own errors and notes it once. It prints nothing. Syntax and annotations stay readable
for Python 3.8, hence the quoted types: ranks may run an older Python than the agent.
"""
