"""Objectives, the losses that training minimizes. Each has a file with its settings, equation, paper, differences from it, and the
loss.

    next_token        cross-entropy of the next token
    preferences/      completions that were compared or labeled: dpo, simpo, cpo, orpo, kto, reward models
    texts/            texts that are scored or embedded whole: classify, rerank, contrastive, similarity
    clicks/           clicks of users on items: rank, retrieve
    images/           denoisers: diffusion, edm, mean_flow, dreambooth; controlnet; textual_inversion; autoencoders: autoencode
    distillation/     a teacher's distributions: distill, gkd, and across tokenizers uld, gold

Objectives of reinforcement learning are in `rl.algorithms`. To add an objective, add a file here and its line below. A user's file
needs
no line: `objective=FILE.py:CLASS` names a class of settings that derives from `train.objectives.objective.Objective`.

This file imports no jax, and neither do objectives at their top, because settings are read without it.
"""

from argosy.core.registry import Registry

_HERE = "argosy.train.objectives"

OBJECTIVES = Registry(
    "objective",
    {
        "next_token": f"{_HERE}.next_token:NextToken",
        "dpo": f"{_HERE}.preferences.dpo:DPO",
        "simpo": f"{_HERE}.preferences.simpo:SimPO",
        "cpo": f"{_HERE}.preferences.cpo:CPO",
        "orpo": f"{_HERE}.preferences.orpo:ORPO",
        "kto": f"{_HERE}.preferences.kto:KTO",
        "reward": f"{_HERE}.preferences.reward:RewardModel",
        "process_reward": f"{_HERE}.preferences.process_reward:ProcessReward",
        "classify": f"{_HERE}.texts.classify:Classify",
        "contrastive": f"{_HERE}.texts.contrastive:Contrastive",
        "similarity": f"{_HERE}.texts.similarity:Similarity",
        "rerank": f"{_HERE}.texts.rerank:Rerank",
        "rank": f"{_HERE}.clicks.rank:Rank",
        "retrieve": f"{_HERE}.clicks.retrieve:Retrieve",
        "diffusion": f"{_HERE}.images.diffusion:Diffusion",
        "edm": f"{_HERE}.images.edm:EDM",
        "mean_flow": f"{_HERE}.images.mean_flow:MeanFlow",
        "dreambooth": f"{_HERE}.images.dreambooth:DreamBooth",
        "controlnet": f"{_HERE}.images.controlnet:ControlNetDiffusion",
        "textual_inversion": f"{_HERE}.images.textual_inversion:TextualInversion",
        "autoencode": f"{_HERE}.images.autoencode:Autoencode",
        "distill": f"{_HERE}.distillation.distill:Distill",
        "gkd": f"{_HERE}.distillation.gkd:GKD",
        "uld": f"{_HERE}.distillation.uld:ULD",
        "gold": f"{_HERE}.distillation.gold:GOLD",
    },
    files=True,
)
OBJECTIVES.add_installed("argosy.objectives")
