"""Distillation: a student learns from a teacher's distributions, on given text or on its own completions.

    distill    on given text                                                  arXiv:1503.02531
    gkd        on the student's own completions and on given completions      arXiv:2306.13649
    uld        on given text, from a teacher with another tokenizer           arXiv:2402.12030
    gold       as uld, on the student's own completions and on given completions
"""
