"""What survives a restart of the store.

journal      Journal: what the store knows, kept in the region's headers as it changes, for the store after it
recovery     Adoption: a store takes up what the one before it left in the region.
region_file  The region file: made or taken up, locked against a second store, prefaulted in the background.
"""
