"""Reinforcement learning on completions that the engine samples.

    policies       settings of the algorithms, and of rollouts
    rollouts       prompts to updates: answers, rewards, advantages, parts of one shape; what a run calls
    answers, compare, experience, policy, critic    the steps of that
    reward_functions, reward_models, builtin_rewards, sandbox    where rewards come from

The mathematics, pure functions over arrays:

    rewards        several rewards as one, DAPO's length penalty, a reward per token
    advantages/    how much better a completion is than expected: GRPO, Dr. GRPO, RLOO, REINFORCE++, ReMax, OPO, GPG, GDPO, GAE
    losses/        the loss of each token: PPO, GSPO, CISPO, REINFORCE, the critic's, entropy; and three ways to normalize it
    kl             the penalty for leaving the reference, in the loss or in the reward
    correction     importance weights where the sampler's log-probabilities differ from the trainer's
    metrics        metrics that add up over parts of a batch

Shapes: g prompts (groups), n completions of each, B = g n rows in that order, T positions. `mask` [B T] is 1 on the policy's own
tokens, the EOS included: without it stopping is never learned; it is 0 on padding and on what an environment wrote. Numbers where
the mask is 0 may be anything, NaN included. Log-probabilities are in nats.

Advantages and corrections compare completions, so they are computed once over all completions of a step. Losses are sums with their
weights, so they may be computed in parts.
"""
