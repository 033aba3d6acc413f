"""Damage to any file of a bundle must be found, and the file named, before anything of it runs.

    ./run python tests/campaign_bundle.py [n=1000] [seed=0] [bundle=FOLDER [key=PUB.pem]]

n times one file of a copy is damaged: a bit flipped, cut short at a random byte, or deleted, over every file in turn. Opening the copy
must fail with an error of ours that names the file. Without `bundle`, a small one is made. Prints a line for each file; exit code 1
where one damage came through.
"""

import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from campaign_flip import cut_file, delete, flip

from argosy.core.errors import ArgosyError
from argosy.export.bundle import Bundle
from argosy.export.verify import verify_bundle

WAYS = (flip, cut_file, delete)


def campaign(whole: Path, folder: Path, n: int, seed: int, key: str | None = None) -> tuple[dict[str, Counter[str]], list[str]]:
    """Damages a bundle n times. Returns how often each file was damaged in which way, and what came through."""
    draw = random.Random(seed)
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    folder.mkdir(exist_ok=True)
    copy = Path(shutil.copytree(whole, folder / "copy"))
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    through = []
    for i in range(n):
        name, way = names[i % len(names)], WAYS[i // len(names) % len(WAYS)]
        path = copy / name
        way(path, draw)
        if not path.exists() or path.read_bytes() != (whole / name).read_bytes():
            kinds[name][way.__name__] += 1
            try:
                Bundle.open(copy, key=key)
                through.append(f"{name}: {way.__name__} came through")
            except ArgosyError as error:
                if name not in str(error):
                    through.append(f"{name}: {way.__name__} was found, and another file named: {error}")
        shutil.copyfile(whole / name, path)
    # Every damage was undone.
    verify_bundle(copy)
    return dict(kinds), through


def main() -> int:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "bundle" in words:
            whole = Path(words["bundle"])
        else:
            from export.bundle_files import small_bundle

            whole = small_bundle(folder / "whole", batch=[1, 4])
        kinds, through = campaign(whole, folder, int(words.get("n", 1000)), int(words.get("seed", 0)), words.get("key"))
    for file, ways in kinds.items():
        print(f"{file}: {', '.join(f'{way} {count}' for way, count in ways.items())}")
    print(f"{sum(map(Counter.total, kinds.values()))} damages, {len(through)} came through")
    print("\n".join(through))
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
