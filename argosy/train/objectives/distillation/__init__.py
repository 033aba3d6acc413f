"""Distillation: a student learns from a teacher's distributions, on given text or on its own completions.

    distill    on given text                                           arXiv:1503.02531
    gkd        on completions of the student's own, and on given ones  arXiv:2306.13649
    uld        on given text, of a teacher with another tokenizer      arXiv:2402.12030
    gold       the same on the student's own completions, and on given ones
"""
