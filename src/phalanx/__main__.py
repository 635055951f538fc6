"""``python -m phalanx``, which is also what ``torchrun -m phalanx`` and ``srun python -m phalanx`` start."""

from phalanx.cli.main import main

if __name__ == "__main__":
    main()
