"""Reinforcement learning on completions that the engine samples, and distillation on them.

    algorithms/    an algorithm a file: its settings, equation, paper, and its advantages or loss
    policy/        what they share: settings, the objective over packed completions, advantages of turns, KL, corrections, the critic
    rollouts/      prompts to updates: sampling, packing, the batches that a run reads
    rewards/       where rewards come from: functions in processes of their own, reward models, built-in ones
    environments/  what a policy talks with for several turns; users write to `environment`
    sandbox/       code that nobody has read, with limits that the kernel keeps
    expressions    mathematical expressions, for rewards and the calculator

Shapes: g prompts (groups), n completions of each, B = g n rows in that order, T positions. `mask` [B T] is 1 on the policy's own
tokens, the EOS included: without it stopping is never learned; it is 0 on padding and on what an environment wrote. Numbers where
the mask is 0 may be anything, NaN included. Log-probabilities are in nats.

Advantages and corrections compare completions, so they are computed once over all completions of a step. Losses are sums with their
weights, so they may be computed in parts.
"""
