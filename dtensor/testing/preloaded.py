"""Imported last by the server process that ranks are forked from (`processes.PRELOADED`).

What has been imported by then stays, so the garbage collector need not look at it: it would write to the memory of each
object, and each rank would have to copy that.
"""

import gc

gc.collect()
gc.freeze()
