"""The instances behind the proxy: what is known of each, who starts them, and how their health is learnt."""
