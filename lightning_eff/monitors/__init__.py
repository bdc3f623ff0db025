"""What watches a run and changes nothing: callbacks for `Trainer(callbacks=[...])`."""
