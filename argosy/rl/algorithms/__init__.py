"""Algorithms of reinforcement learning, one per file: settings, equation, paper, differences, and the algorithm's own advantages or
loss.

    name             advantages                      loss of a token          mean over            source
    ppo              against a critic's values       PPO's, clipped           tokens               arXiv:1707.06347
    grpo             reward against its group        PPO's, clipped           completions          arXiv:2402.03300
    dr_grpo          the same, not divided by std    PPO's                    constant length      arXiv:2503.20783
    dapo             as grpo                         PPO's, clip-higher       tokens               arXiv:2503.14476
    gspo             as grpo                         ratio of the sequence    completions          arXiv:2507.18071
    cispo            as grpo                         bounded weights          tokens               arXiv:2506.13585
    rloo             leave one out                   REINFORCE                completions, summed  arXiv:2402.14740
    reinforce_pp     normalized over the batch       PPO's                    tokens               arXiv:2501.03262
    remax            reward against the greedy one   REINFORCE                completions, summed  arXiv:2310.10505
    gpg              against its group, not divided  REINFORCE                tokens               arXiv:2504.02546
    opo              against a length-weighted mean  REINFORCE                tokens               arXiv:2505.23585

All algorithms consist of the same parts with different defaults, so any part can be exchanged: `objective=grpo objective.scale=none`.
Dynamic sampling and the punishment of overlong completions are settings of `rollout`, which the recipe of an algorithm sets.

To add an algorithm, add a file here and its lines below. A user's file needs no line. It provides a class of settings that derives from
`Policy` (`objective=FILE.py:CLASS`), or a function (`objective.advantages=FILE.py:FUNCTION`, `objective.loss=FILE.py:FUNCTION`). A
function receives the inputs that its parameters name, out of

    advantages    rewards [g n] (less the KL penalty, unless it takes `penalty` [B T] too), lengths [g n] in tokens, greedy [g 1] (the
                  rewards of greedy completions, which are then sampled), mask [B T], scale (a setting); it returns
                  `advantages.groups.Advantages`, or `TokenAdvantages`, which compare with more than the group
    loss          new, old [B T] (log-probabilities), advantages, mask [B T], low, high, dual (settings); it returns `TokenLoss`

This file imports no jax, and neither do algorithms at their top, because settings are read without it.
"""

from argosy.core.registry import Registry

_HERE = "argosy.rl.algorithms"

ALGORITHMS = {
    "ppo": f"{_HERE}.ppo:PPO",
    "grpo": f"{_HERE}.grpo:GRPO",
    "dr_grpo": f"{_HERE}.dr_grpo:DrGRPO",
    "dapo": f"{_HERE}.dapo:DAPO",
    "gspo": f"{_HERE}.gspo:GSPO",
    "cispo": f"{_HERE}.cispo:CISPO",
    "rloo": f"{_HERE}.rloo:RLOO",
    "reinforce_pp": f"{_HERE}.reinforce_pp:ReinforcePP",
    "remax": f"{_HERE}.remax:ReMax",
    "gpg": f"{_HERE}.gpg:GPG",
    "opo": f"{_HERE}.opo:OPO",
}

ADVANTAGES = Registry(
    "comparison of rewards",
    {
        "grpo": f"{_HERE}.grpo:grpo",
        "rloo": f"{_HERE}.rloo:rloo",
        "reinforce_pp": f"{_HERE}.reinforce_pp:reinforce_pp",
        "reinforce_pp_baseline": f"{_HERE}.reinforce_pp:reinforce_pp_baseline",
        "remax": f"{_HERE}.remax:remax",
        "gpg": f"{_HERE}.gpg:gpg",
        "opo": f"{_HERE}.opo:opo",
    },
    files=True,
)
# Other names of the advantages, which say what a reward is compared with.
ALIASES = {
    "group": "grpo",
    "leave_one_out": "rloo",
    "batch": "reinforce_pp",
    "group_batch": "reinforce_pp_baseline",
    "greedy": "remax",
    "useful": "gpg",
    "length": "opo",
}

LOSSES = Registry(
    "loss of a token",
    {
        "ppo": f"{_HERE}.ppo:ppo",
        "gspo": f"{_HERE}.gspo:gspo",
        "cispo": f"{_HERE}.cispo:cispo",
        "reinforce": f"{_HERE}.reinforce:reinforce",
    },
    files=True,
)
ADVANTAGES.add_installed("argosy.advantages")
LOSSES.add_installed("argosy.token_losses")
