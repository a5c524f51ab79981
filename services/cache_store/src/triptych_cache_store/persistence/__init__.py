"""State that outlives the store's process, in the region file.

region_file  makes, opens, locks and prefaults the file
journal      every change of entries, pins and clients, in the region's headers; `core.recovery` reads it
"""
