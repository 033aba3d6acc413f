"""What each verb of the command line does, composed from the other rooms. The only room that knows them all."""
