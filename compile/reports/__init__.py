"""What people read: commands, pages, summaries, differences."""
