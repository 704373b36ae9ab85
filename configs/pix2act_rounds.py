"""How the start of pix2act_pages.py was made, stage by stage; no config itself.

    python -m uirl_jax.main --config=configs/pix2act_pages.py:base --workdir=runs/pix2act-base
    python -m uirl_jax.main --config=configs/pix2act_pages.py:more --workdir=runs/pix2act-more
    python -m uirl_jax.main --config=configs/pix2act_pages.py:last --workdir=runs/pix2act-last
    python -m uirl_jax.main --config=configs/pix2act_pages.py:again --workdir=runs/pix2act-again
    python -m uirl_jax.main --config=configs/pix2act_pages.py:aim --workdir=runs/pix2act-aim
    python -m tools.average_models --out=runs/pix2act-mean runs/pix2act-last/cold_start/model \
        runs/pix2act-again/cold_start/model runs/pix2act-aim/cold_start/model
    python -m uirl_jax.main --config=configs/pix2act_pages.py:figures --workdir=runs/pix2act-figures
    python -m tools.average_models --out=runs/pix2act-half runs/pix2act-mean \
        runs/pix2act-figures/cold_start/model
    python -m uirl_jax.main --config=configs/pix2act_pages.py:polish --workdir=runs/pix2act-polish
    python -m tools.average_models --out=runs/pix2act-start runs/pix2act-mean \
        runs/pix2act-figures/cold_start/model runs/pix2act-polish/cold_start/model

`:base` is a cold start on 150 correct demonstrations of each task, played first (Chromium), of the
start of miniwob_pages.py. The others go on from it on other demonstrations, a number of rounds:
what a model before solved, by its tuning episodes, is shown once in a round, so that it is not
forgotten; what it did not, more often. `:polish` sees those of `:figures` once more.
"""

# The model before, seed, steps, rounds and learning rate.
GOING_ON = {
    "more": ("base/cold_start/model", 29, 620, 45, 1.5e-3),
    "last": ("more/cold_start/model", 30, 720, 56, 1.5e-3),
    "again": ("last/cold_start/model", 31, 1000, 52, 1.5e-3),
    "aim": ("again/cold_start/model", 32, 600, 32, 1.5e-3),
    "figures": ("mean", 33, 800, 45, 1.2e-3),
    "polish": ("half", 34, 220, 0, 6e-4),  # the demonstrations of :figures once more
}
