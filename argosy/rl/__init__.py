"""Reinforcement learning on completions that the engine samples, and distillation on them.

    algorithms/    one file per algorithm: its settings, equation, paper, and its advantages or loss
    policy/        parts that algorithms share: settings, the objective over packed completions, KL, importance weights, the critic
    advantages/    from rewards to advantages: groups, turns, GAE
    rollouts/      from prompts to updates: sampling, packing, and the batches that a run reads
    rewards/       sources of rewards: functions in separate processes, reward models, built-in functions
    environments/  environments for episodes of several turns; users implement the interface in `environment`
    sandbox/       runs untrusted code under limits that the kernel enforces
    expressions    mathematical expressions, for rewards and the calculator

Shapes: there are g prompts (groups) and n completions of each. The B = g n rows are in that order, with T positions each. `mask` [B T]
is 1 on tokens that the policy sampled. The end-of-sequence token is among them, because without it the policy never learns to stop.
The mask is 0 on padding and on tokens of an environment; arrays may hold any value there, NaN included. Log-probabilities are in nats.

Advantages and importance weights compare completions, so they are computed once over all completions of a step. Losses are sums with
their weights, so they can be computed in micro-batches.
"""
