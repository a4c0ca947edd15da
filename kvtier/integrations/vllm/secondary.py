class KVTierSecondaryTier: pass
