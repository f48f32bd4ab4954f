"""Reports for people: commands, the page, summaries, locks and differences."""
