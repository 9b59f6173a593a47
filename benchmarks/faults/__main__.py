from .battery import main

main()
