#!/usr/bin/env python3
"""Memory and joins of long videos of the toy model: scripts/nano/chain.py LTX2 OUT [SECONDS…]

Makes a video of each length (5 and 60 s) by chaining, once as users run it and once with one arena for all threads, and prints a table for
docs/decisions/given-videos.md: resident memory (its peak, and the most in the second fifth and in the last fifth of the run), and
the largest difference of two neighbouring samples where clips meet and elsewhere. Ten minutes on two cores.
"""

import array
import os
import subprocess
import sys
import time
import wave
from pathlib import Path

CLIP, OVERLAP, RATE = 33, 9, 24
PROMPT = "a red circle bounces on blue, low beeps"


def resident(pid):
    """Megabytes; none of a process that ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kilobytes[0]) / 1e3 if kilobytes else None


def run(ltx2, out, seconds, arenas):
    """Resident memory every 50 ms while a video is made; its sound."""
    sound = out / f"{seconds}.wav"
    chain = [f"--set=request.chain.clip={CLIP}", f"--set=request.chain.overlap={OVERLAP}"]
    command = [ltx2, "generate", "-c", "nano", "--platform", "cpu", "--seconds", str(seconds), "--chain", *chain, "--steps", "4"]
    command += ["-p", PROMPT, "--force", "--save-audio", sound, "-o", out / f"{seconds}.mp4"]
    environment = os.environ | ({"MALLOC_ARENA_MAX": str(arenas)} if arenas else {})
    samples = []
    with open(out / f"{seconds}.log", "w") as log:
        process = subprocess.Popen([str(part) for part in command], env=environment, stderr=log)
        while process.poll() is None:
            if size := resident(process.pid):
                samples.append(size)
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{seconds} s: ended with {process.returncode}: {log.name}")
    return samples, sound


def jumps(sound):
    """The largest difference of neighbouring samples, of full scale: within 10 ms of where clips meet, and elsewhere."""
    with wave.open(str(sound)) as file:
        rate, channels = file.getframerate(), file.getnchannels()
        samples = array.array("h", file.readframes(file.getnframes()))[::channels]
    met = [round((CLIP + n * (CLIP - OVERLAP)) / RATE * rate) for n in range(len(samples) * RATE // rate // (CLIP - OVERLAP) + 1)]
    # A join reaches over the sound of the overlap.
    near = {at for end in met for at in range(end - OVERLAP * rate // RATE, end + rate // 100)}
    at_joins = elsewhere = 0
    for at in range(1, len(samples)):
        difference = abs(samples[at] - samples[at - 1]) / 32768
        if at in near:
            at_joins = max(at_joins, difference)
        else:
            elsewhere = max(elsewhere, difference)
    return at_joins, elsewhere


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    ltx2, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    lengths = [int(length) for length in sys.argv[3:]] or [5, 60]
    print("| video | peak, MB | second fifth | last fifth | peak with one arena | largest step of the sound at joins | elsewhere |")
    print("|---|---|---|---|---|---|---|")
    for seconds in lengths:
        samples, sound = run(ltx2, out, seconds, None)
        one, _ = run(ltx2, out, seconds, 1)
        fifth = len(one) // 5
        figures = [max(samples), max(one[fifth : 2 * fifth]), max(one[-fifth:]), max(one)]
        at_joins, elsewhere = jumps(sound)
        print(f"| {seconds} s | {' | '.join(f'{figure:.0f}' for figure in figures)} | {at_joins:.4f} | {elsewhere:.4f} |", flush=True)


main()
