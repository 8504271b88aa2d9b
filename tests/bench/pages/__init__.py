"""Pages: what turns committed results into README, RESULTS.md, tables and pictures. Nothing here measures."""
