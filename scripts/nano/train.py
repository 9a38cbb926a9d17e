"""Trains a stage of the toy model: train.py STAGE FOLDER --seconds 300.

FOLDER holds the model and the logs. A component without weights there starts from initial ones.
"""

import argparse

import autoencoders
import model
from flow import flow
from job import Job

STAGES = {
    "video": (autoencoders.video, dict(batch=32, rate=1e-3, seed=1)),
    "video_decoder": (autoencoders.video_decoder, dict(batch=32, rate=1e-3, seed=1)),
    "audio": (autoencoders.audio, dict(batch=16, rate=1e-3, seed=2)),
    "flow": (flow, dict(batch=256, rate=1.5e-3, seed=3)),
    "upsampler": (autoencoders.upsampler, dict(batch=128, rate=2e-3, seed=4)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=10**9, help="limit")
    parser.add_argument("--batch", type=int, help="smaller ones are for a try on a CPU")
    args = parser.parse_args()
    stage, options = STAGES[args.stage]
    options = {**options, "batch": args.batch or options["batch"]}
    model.save_configurations(args.folder)
    stage(Job(args.stage, args.folder, args.seconds, args.steps, **options))


if __name__ == "__main__":
    main()
