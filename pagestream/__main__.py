"""`python -m pagestream`: the same as the command `pagestream`."""

from pagestream.cli import main

if __name__ == "__main__":
    main()
