"""What outlives the store's process, in the region file.

region_file  makes, opens, locks and prefaults the file
journal      every change of entries, pins and clients, in the region's headers
recovery     a store takes up what the store before it left
"""
