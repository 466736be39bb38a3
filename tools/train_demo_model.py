"""Train the bundled model, in stages that may run on different machines.

python -m tools.train_demo_model prepare     the standard library to token ids        needs
tokenizers python -m tools.train_demo_model train       token ids to weights, CPU or one GPU
needs torch and numpy alone python -m tools.train_demo_model export      weights to a Hugging Face
folder         needs safetensors python -m tools.train_demo_model evaluate    figures, into the
folder's model card    needs tokenizers
"""

import argparse
import importlib

STAGES = ("prepare", "train", "export", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    name = parser.parse_known_args()[0].stage
    stage = importlib.import_module(
        f"tools.demo_model.{name}"
    )  # imported here: the libraries of the other stages may be missing
    parser = argparse.ArgumentParser(prog=f"train_demo_model {name}", description=stage.__doc__)
    parser.add_argument("stage", choices=(name,))
    stage.add_arguments(parser)
    stage.run(parser.parse_args())


if __name__ == "__main__":
    main()
