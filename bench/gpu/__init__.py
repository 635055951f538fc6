"""The first hour on a GPU in one command of ten minutes: does it keep its bits, how fast is it, and where does time and memory go?

    make gpu                                   # or, from the repository's root: python -m bench.gpu
    python -m bench.gpu --ranks 8              # on a machine with several GPUs
    python -m bench.gpu --only speed --only trace --preset llama-1b
    python -m bench.gpu --device cpu           # a small stand-in, anywhere

Parts run in order of worth, each in processes of its own with a limit, so that an error, a hang or a full memory ends no other
part. The findings of a part are written at once; at the end there are one JSON file and one Markdown page.
"""
